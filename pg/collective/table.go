package collective

// Table has the sizes at which algorithms change, and of chunks. All members of a mesh use the same: it travels with the view.
type Table struct {
	OneShot int `json:"one_shot"` // see DefaultTable
}

// DefaultTable is what is used where nothing was measured.
var DefaultTable = Table{}
