"""What each leaf of a parameter tree is: paths, names, shapes, and what they tell.

paths -> stacks taken off -> Flax's words and order -> rules -> dimension numbers.
"""
