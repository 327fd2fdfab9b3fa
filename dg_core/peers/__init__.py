"""Providers of peer memory, one a module, and what they share.

``meeting`` has ranks take the steps of a construction together, ``direct`` is the exchange of ranks that can
read and write each other's memory, ``waiting`` is how both wait and fail, and ``devices`` what providers of a
vendor's memory share. The others are providers: ``symm`` finds them by name, so that a vendor's module is
loaded where its memory is asked for, and this file imports none.
"""
