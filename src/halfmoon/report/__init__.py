"""Tables and pictures from run folders; reads what a run left on disk and needs no torch."""
