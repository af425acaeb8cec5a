"""What ``simulate`` is made of: one step replayed, forward and backward, under a plan."""
