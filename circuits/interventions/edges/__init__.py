"""Applies all cut edges of a run together: each receiver reads a stream in which its cut senders are replaced.

A receiver's input is the residual stream of the run plus the sum over its cut edges of (the sender's replacement − its
output in this run). Nothing else is changed: the receiver's output goes on as usual, to later receivers too. All edges
into a receiver that are not cut therefore carry what the edited run computes.

No second run is needed. The input of each site is read before any hook there. Edits and the user's hooks act on a
receiver's stream as they act on the run's: where hooks f change the stream x, a difference d that passes the site
becomes f(x + d) − f(x). Where a norm stands between a component's weights and the stream, f is that norm: the
differences of all senders before it that a receiver is cut off from pass it together.

`plan` numbers the senders of cuts and holds what one run collects, `hooks` opens cuts and carries them out.
"""
