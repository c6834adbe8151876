"""The trainer of every task and model: ``train.train``; every setting of it is in ``config``, without torch."""
