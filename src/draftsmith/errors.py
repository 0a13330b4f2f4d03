"""The one kind of error that is the user's to mend: printed as one line, exit code 2, no traceback."""


class UserError(Exception):
    """Message = what is wrong, where (file, line, field, unit), and what to do about it."""


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something, else the error's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
