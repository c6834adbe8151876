"""Analyses of Gopalani, Lubana, Hu 2024 (arXiv:2410.22244), matrix completion."""
