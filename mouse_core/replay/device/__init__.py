"""What a replay on a device is told and checks, whatever framework its arrays are of."""
