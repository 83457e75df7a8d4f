"""What the machine has, found out without torch: which device to run on, and what its GPU can do."""
