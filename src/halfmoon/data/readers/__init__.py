"""Readers of data set formats, one module per format: they return decoded images or raise a `UserError`."""
