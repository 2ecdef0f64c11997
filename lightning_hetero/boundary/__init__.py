"""The boundary: what carries a call of a placed module into its layout and the result, and the gradient, back.

``items`` cuts calls, ``route`` plans transfers in integers, ``exchange`` executes them, ``call`` is the hook.
"""
