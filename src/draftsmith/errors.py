"""The one kind of error that is the user's to mend: printed as one line, exit code 2, no traceback."""


class UserError(Exception):
    """Message = what is wrong, where (file, line, field, unit), and what to do about it."""
