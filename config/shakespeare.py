steps = 600
