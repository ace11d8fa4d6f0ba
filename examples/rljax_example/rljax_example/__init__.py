"""An environment, an agent and a grader for rljax. Nothing is imported here: rljax imports what a config names."""
