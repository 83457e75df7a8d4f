"""How a checkpoint stores its linear maps, from config.json alone. No torch."""
