"""Records → figures, one file a kind of figure. No torch; matplotlib is imported when a figure is drawn."""
