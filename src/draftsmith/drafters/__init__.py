"""The table of drafters: a new one is one file here and one row."""

from draftsmith.drafters.dflash import DFlash, DFlashShape

DRAFTERS = {"dflash": (DFlash, DFlashShape)}
