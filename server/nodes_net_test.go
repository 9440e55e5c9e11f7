package server

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// push reads until a push of a type, past others.
func (w *wire) push(t protocol.Type) []byte {
	w.tb.Helper()
	for {
		if f := w.receive(); f.h.Sequence == 0 && f.h.Type == t {
			return f.b
		}
	}
}

// A node's device over real connections, as in docs/TIERS.md: attached, given out, written to with a handle, copied to.
func TestANodeServesADevice(t *testing.T) {
	s := startServer(t, testConfig(t))
	node, client := dial(t, "tcp", s.Addr()), dial(t, "unix", s.Config().Socket)
	opened := node.handshake(protocol.HandshakeRequest{
		InstanceID: "node/h1/1", Features: protocol.FeatureNode | protocol.FeatureCopies, BootID: "h1", PID: 1,
	})
	require.NoError(t, opened.Err())
	require.NotZero(t, opened.Features&protocol.FeatureNode)
	pool := opened.Pool
	attach := protocol.AttachRequest{
		UUID: strings.Repeat("1", 32), Node: "h1", Tier: "ssd", Coherence: "hardware", Size: 1 << 20, Align: 4096, BootID: "h1",
	}
	var reply protocol.AttachReply
	for range 2 {
		attach.Mutation = node.next()
		require.NoError(t, reply.Decode(node.call(protocol.TypeAttach, attach.Append(nil))))
		require.NoError(t, reply.Err())
		attach.Generation, attach.Ready, attach.Endpoint = reply.Generation, true, protocol.Endpoint{Engine: "e", Storage: true}
	}

	hello := client.handshake(protocol.HandshakeRequest{InstanceID: "c", Features: protocol.FeatureCopies, BootID: "h2", PID: 1})
	require.NoError(t, hello.Err())
	require.Equal(t, pool, hello.Pool, "a node's device is none that the pool has its id from")
	require.Len(t, hello.Devices, 2)
	require.Equal(t, &attach.Endpoint, hello.Devices[1].Endpoint)
	a := client.alloc(protocol.AllocRequest{InstanceID: "c", Size: 64 << 10, PageSize: 4096, Device: reply.Device})
	require.NoError(t, a.Err())
	require.Equal(t, reply.Device, a.Region.Device)

	access := protocol.AccessRequest{RegionID: a.Region.RegionID, Epoch: a.Region.Epoch}
	seq := client.send(protocol.TypeAccess, access.Append(nil))
	var grant protocol.GrantPush
	require.NoError(t, grant.Decode(node.push(protocol.TypeGrant)))
	granted := protocol.GrantedRequest{ID: grant.ID, Endpoint: protocol.Endpoint{Engine: "e", Buffer: 7}}
	node.call(protocol.TypeGranted, granted.Append(nil))
	var handle protocol.AccessReply
	require.NoError(t, handle.Decode(client.reply(seq)))
	require.NoError(t, handle.Err())
	require.Equal(t, uint64(7), handle.Endpoint.Buffer)

	own := client.alloc(protocol.AllocRequest{InstanceID: "c", Size: 64 << 10, PageSize: 4096})
	require.NoError(t, own.Err())
	require.NotEqual(t, reply.Device, own.Region.Device, "the slowest tier is for those who name it")
	require.True(t, client.register(own.Region, 0, "k").Results[0].IsNew)
	order := protocol.CopyRequest{Mutation: client.next(), Keys: [][]byte{[]byte("k")}, Node: "h1"}
	var tasks protocol.CopyReply
	require.NoError(t, tasks.Decode(client.call(protocol.TypeCopy, order.Append(nil))))
	require.NoError(t, tasks.Err())
	node.push(protocol.TypeTasksPush)
	var work protocol.TasksReply
	ask := protocol.TasksRequest{Device: reply.Device}
	require.NoError(t, work.Decode(node.call(protocol.TypeTasks, ask.Append(nil))))
	require.Equal(t, tasks.Tasks[0], work.Tasks[0].ID)
	require.Equal(t, own.Region.RegionID, work.Tasks[0].Items[0].RegionID)

	require.True(t, s.DeviceStatuses()[1].Ready)
	require.Equal(t, 1, s.DeviceStatuses()[1].Tasks)
	require.Equal(t, "waiting", s.Tasks()[0].State)
	report, err := s.Check(t.Context(), true)
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	require.Equal(t, "node/h1/1", report.Foreign[0].Home)
}
