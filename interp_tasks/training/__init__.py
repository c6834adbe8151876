"""The trainer of every task and model: ``trainer.train``; every setting of it is in ``config``, without torch."""
