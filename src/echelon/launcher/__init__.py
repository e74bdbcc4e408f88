"""Start processes and learn how they ended. Imports no torch; the agent and the ranks load it.

Not named `launch`: the function of that name is the attribute `echelon.launch`.
"""
