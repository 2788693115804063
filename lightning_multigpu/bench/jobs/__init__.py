"""Jobs of ranks that take turns: started on one host or several, asked in turn, and ended whatever they do."""
