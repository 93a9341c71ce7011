"""What operators are asked for: one file for each, under its name, with what makes a problem of it."""
