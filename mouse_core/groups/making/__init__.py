"""What batches of rollouts are made by: what each is worth, which are kept, and which are drawn."""
