"""Workarounds for other libraries, one module each.

Each module begins with the fault it works around, the upstream issue or the version that shows the
fault, and the condition under which the module can go.
"""
