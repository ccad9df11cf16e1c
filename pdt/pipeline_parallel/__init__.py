"""The layers of a model on several ranks, and schedules that keep these busy."""
