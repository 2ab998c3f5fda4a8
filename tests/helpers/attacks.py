"""An attack that the simulator finds by its name"""


def idle(known):
    """All attackers send what they were given: nothing has moved"""
    return {name: 0 * value for name, value in known.own[0].items()}
