"""Start processes and learn how they ended. Imports without torch; the elastic agent and the ranks load it.

Not named `launch`: that is the function, and both would be the attribute `echelon.launch`.
"""
