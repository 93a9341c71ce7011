"""Evaluations of papers, simulated or from recorded measurements, and a measurement of overlap losses."""
