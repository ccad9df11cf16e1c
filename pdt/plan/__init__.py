"""What a training run will take, before it runs: closed forms, pure."""
