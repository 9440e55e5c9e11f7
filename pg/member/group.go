package member

import "context"

// Group is one group as this process takes part in it. Its methods may be called concurrently.
type Group struct{}

// NewGroup attaches this process to a group, which its first process makes: a [*SpecError] says that others describe it otherwise.
// From then on the hooks may be called.
func (r *Registry) NewGroup(ctx context.Context, cfg Config) (*Group, error) { return nil, nil }

// Start waits until the group has a view: founders until they are in the first one. The error is a [*StartError] that names who is
// missing.
func (g *Group) Start(ctx context.Context) error { return nil }

// Rank is this process's slot.
func (g *Group) Rank() int { return 0 }

// Cap is the number of slots, of which Ranks says the global ranks that have one.
func (g *Group) Cap() int { return 0 }

// Ranks are the global ranks of the slots. Those at the end that nobody has are left out.
func (g *Group) Ranks() []int { return nil }

// View is the view that was committed last and that Hooks.Commit has been called with.
func (g *Group) View() View { return View{} }

// PeerState tells of each rank whether it is alive, connected to all members and either a member or waiting to be: from what this
// process knows, without asking anybody.
func (g *Group) PeerState(ranks ...int) ([]bool, error) { return nil, nil }

// Activate makes ranks members. It waits until all who will then be members are alive, connected to each other and members already or
// waiting to be, at most [AdmitTimeout]. That several processes ask for the same is fine.
func (g *Group) Activate(ctx context.Context, ranks ...int) (Response, error) { return Response{}, nil }

// Deactivate removes ranks from the active set, dead or alive.
func (g *Group) Deactivate(ctx context.Context, ranks ...int) (Response, error) {
	return Response{}, nil
}

// Join waits, outside of the view, until somebody activates this process.
func (g *Group) Join(ctx context.Context) error { return nil }

// Sync waits until failures that this process knows of are dealt with; without AutoSync it has them be dealt with.
func (g *Group) Sync(ctx context.Context) (Response, error) { return Response{}, nil }

// Extend raises the number of slots to n. The new ones are inactive, and have no process until one that extends Ranks attaches.
func (g *Group) Extend(ctx context.Context, n int) error { return nil }

// Suspect is Registry.Suspect for this group alone, by rank in it: a channel to a member has failed.
func (g *Group) Suspect(rank int, incarnation uint64, why error) {}

// Linked is Registry.Linked for this group alone.
func (g *Group) Linked(rank int, incarnation uint64) {}

// Resync asks for a new view of the same members, since they are not at one mind about the operations of an epoch: they have called
// different ones, say. Operations that anybody has begun are not run again. Nothing happens if that epoch is over.
func (g *Group) Resync(epoch uint64, why error) {}

// Close leaves the group. Others go on at once, without waiting for a lease.
func (g *Group) Close() error { return nil }
