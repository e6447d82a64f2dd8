// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"bytes"
	"testing"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// serverIDs returns the connection IDs of the server that a client's packets
// had since the last call of forget: the DCID of its short headers, and the
// SCID of the server's long ones.
func serverIDs(t *testing.T, c *client, length int) (ids [][]byte) {
	t.Helper()
	add := func(id []byte) {
		for _, known := range ids {
			if bytes.Equal(known, id) {
				return
			}
		}
		ids = append(ids, id)
	}
	for _, s := range append(c.more, c) {
		sent, received := s.wire.traffic()
		for _, p := range sent {
			if p[0]&0x80 == 0 {
				add(p[1 : 1+length])
			}
		}
		for _, p := range received {
			if p[0]&0x80 != 0 {
				scid := 6 + int(p[5])
				if n := int(p[scid]); n != length {
					t.Errorf("a connection ID of the server has %d bytes, want %d", n, length)
					continue
				}
				add(p[scid+1:][:length])
			}
		}
	}
	return ids
}

// With an outer load balancer the IDs say which host to go to, and inside
// which process: connections live across an upgrade and a migration, and all
// their IDs decode to the server ID, also those of a generation that has
// another key.
func TestLoadBalancer(t *testing.T) {
	testutil.NeedRoot(t)
	serverID := []byte{0xc0, 0xff, 0xee}
	for name, lbs := range map[string][2]connid.LoadBalancer{
		"clear": {
			{ConfigRotation: 1, ServerID: serverID, NonceLen: 8},
			{ConfigRotation: 1, ServerID: serverID, NonceLen: 8},
		},
		"encrypted": {
			{ConfigRotation: 2, ServerID: serverID, NonceLen: 8, Key: []byte("sixteen byte key")},
			{ConfigRotation: 2, ServerID: serverID, NonceLen: 8, Key: []byte("sixteen byte key")},
		},
		"encrypted, key changed": {
			{ConfigRotation: 2, ServerID: serverID, NonceLen: 8, Key: []byte("sixteen byte key")},
			{ConfigRotation: 3, ServerID: serverID, NonceLen: 8, Key: []byte("another good key")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			start := func(lb connid.LoadBalancer) *server {
				conf := setup{workers: 3, options: s.options()}
				conf.options.LoadBalancer = &lb
				server := s.start(conf)
				s.flip(server)
				return server
			}
			check := func(c *client, lb connid.LoadBalancer, atLeast int) {
				t.Helper()
				const length = 1 + 3 + 8 + 6 // first octet, server ID, nonce, handle and tag
				ids := serverIDs(t, c, length)
				if len(ids) < atLeast {
					t.Errorf("%d connection IDs, want %d or more", len(ids), atLeast)
				}
				for _, id := range ids {
					got, err := lb.DecodeServerID(id)
					if err != nil || !bytes.Equal(got, serverID) {
						t.Errorf("connection ID %x decodes to %x, %v; want %x", id, got, err, serverID)
					}
					if clear := bytes.Contains(id, serverID); clear != (lb.Key == nil) {
						t.Errorf("connection ID %x shows the server ID: %t", id, clear)
					}
				}
			}

			before := start(lbs[0])
			var clients [12]*client
			for i := range clients {
				clients[i], _ = s.visitor()
			}
			snapshot := s.snapshot()
			after := start(lbs[1])
			for i, c := range clients {
				step := c.move
				if i%2 == 0 {
					step = func() error { return c.wire.rebind() }
				}
				a, err := c.say(make([]byte, 10_000), step)
				if err == nil {
					a, err = c.talk()
				}
				if err != nil || a.generation != before.Number() {
					t.Errorf("client %d: generation %d answers, %v; want %d", i, a.generation, err, before.Number())
				}
				// One for the handshake, and another one for another path.
				check(c, lbs[0], 1+i%2)
			}
			s.only(s.verdictsSince(snapshot), "owner")
			c, a := s.visitor()
			if a.generation != after.Number() {
				t.Errorf("generation %d answers a new client, want %d", a.generation, after.Number())
			}
			check(c, lbs[1], 1)
		})
	}
}
