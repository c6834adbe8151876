"""Finds the one row of a table that a test is about."""


def row_of(frame, **wanted):
    for column, value in wanted.items():
        frame = frame[(frame[column] == value).fillna(False).astype(bool)]
    (row,) = frame.to_dict("records")
    return row
