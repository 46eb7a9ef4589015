"""What rollouts of language models are made of, and what may be noted of them; files and batches are made of these."""
