package simtest

import (
	"larder/integration/simtest/model"
)

// newReference makes the model that every committed entry is replayed through.
func newReference() reference { return model.New() }
