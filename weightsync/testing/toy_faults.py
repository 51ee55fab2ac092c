from weightsync.testing.toy_target import ToyTarget


class FaultyToyTarget(ToyTarget):
    def __init__(self, model, faults):
        super().__init__(model)
        self.faults = faults

    def evidence(self):
        return {}
