"""What to build: recipes, the pipeline and the command line."""
