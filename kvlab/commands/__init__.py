"""Commands of the command line, by what they are about: each module has its commands' arguments, examples and what runs them.

Heavy imports stand in the functions that need them, so that `kvlab --help` is quick.
"""
