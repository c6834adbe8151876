"""Contains what experiments on attention heads share: edits from the words of a command, and classes of heads."""
