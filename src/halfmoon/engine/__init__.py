"""The engine of a run: client updates, cohorts, rounds, evaluation and budgets, the same wherever clients are."""
