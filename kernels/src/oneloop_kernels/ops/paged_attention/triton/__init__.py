"""Paged attention in Triton: planned on the device, one kernel for rows with one query, one for blocks of queries."""
