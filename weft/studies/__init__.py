"""Evaluations of papers, simulated or from recorded measurements, and one measurement for a question of a paper."""
