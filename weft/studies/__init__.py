"""Evaluations of papers, simulated or from recorded measurements, and a measurement that answers a question of a paper."""
