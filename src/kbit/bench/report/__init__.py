"""`kbit bench report`: one HTML page from the result files of `kbit bench` and `kbit eval`.

`results` finds out what each file is, each section module turns files of its kinds into HTML with `markup`
and `svg`, and `page` joins them. The page loads nothing: no script, no font, no picture from outside.
"""
