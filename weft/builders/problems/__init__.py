"""Descriptions of the operators: one file for each operator, under its name."""
