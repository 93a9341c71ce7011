"""Evaluations of papers, simulated or from recorded measurements, and a measurement for a question of a paper."""
