"""Whole tables and figures: recipes, their grids of runs, and what plays them."""
