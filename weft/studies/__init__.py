"""Evaluations of papers, by simulation or from recorded measurements, and measurements of overlap losses, launch
overhead and power.
"""
