"""Private parts of Keras 3: the only modules that use them, each with the behaviour that it relies on.

New releases of Keras are checked against these modules. All others use only public names of Keras.
"""
