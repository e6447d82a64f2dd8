// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tai64n"
)

// peerStatus is what a device knows of a peer.
type peerStatus struct {
	key       device.NoisePublicKey
	endpoint  netip.AddrPort // invalid where there is none
	handshake time.Time      // the last one; zero for none
	// timestamp is that of the peer's last initiation; zero for none.
	timestamp tai64n.Timestamp
}

// statusOf asks a device for its peers.
func statusOf(d *device.Device) ([]peerStatus, error) {
	text, err := d.IpcGet()
	if err != nil {
		return nil, fmt.Errorf("ask the device for its peers: %w", err)
	}
	peers, err := parseStatus(text)
	for i := range peers {
		if p := d.LookupPeer(peers[i].key); p != nil {
			peers[i].timestamp = timestampOf(p)
		}
	}
	return peers, err
}

func parseStatus(text string) ([]peerStatus, error) {
	var all []peerStatus
	var seconds int64
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		if key == "public_key" {
			all = append(all, peerStatus{})
			if err := all[len(all)-1].key.FromHex(value); err != nil {
				return nil, fmt.Errorf("read the device's answer: %s: %w", key, err)
			}
			continue
		}
		if len(all) == 0 {
			continue // of the device itself
		}
		p := &all[len(all)-1]
		var err error
		switch key {
		case "endpoint":
			p.endpoint, err = netip.ParseAddrPort(value)
		case "last_handshake_time_sec":
			seconds, err = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_nsec":
			var nanos int64
			if nanos, err = strconv.ParseInt(value, 10, 64); err == nil && (seconds != 0 || nanos != 0) {
				p.handshake = time.Unix(seconds, nanos)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("read the device's answer: %s: %w", key, err)
		}
	}
	return all, nil
}

// state is what goes to a successor.
type state struct {
	Peers []peerState `json:"peers"`
}

type peerState struct {
	PublicKey string         `json:"public_key"` // hexadecimal
	Endpoint  netip.AddrPort `json:"endpoint"`
	// Handshake is when the peer's session began; zero for none.
	Handshake time.Time `json:"handshake,omitzero"`
	// Timestamp is that of the peer's last initiation (TAI64N); empty for none.
	Timestamp []byte `json:"timestamp,omitempty"`
}

// stateOf is the state of the peers that have been somewhere.
func stateOf(peers []peerStatus) state {
	s := state{Peers: []peerState{}}
	for _, p := range peers {
		if p.endpoint.IsValid() {
			one := peerState{PublicKey: fmt.Sprintf("%x", p.key[:]), Endpoint: p.endpoint, Handshake: p.handshake}
			if p.timestamp != (tai64n.Timestamp{}) {
				one.Timestamp = p.timestamp[:]
			}
			s.Peers = append(s.Peers, one)
		}
	}
	return s
}

// peers is the reverse of stateOf.
func (s state) peers() ([]peerStatus, error) {
	var peers []peerStatus
	for _, p := range s.Peers {
		status := peerStatus{endpoint: p.Endpoint, handshake: p.Handshake}
		copy(status.timestamp[:], p.Timestamp)
		if err := status.key.FromHex(p.PublicKey); err != nil || !p.Endpoint.IsValid() || len(p.Timestamp) > tai64n.TimestampSize {
			return nil, fmt.Errorf("peer %q at %v", p.PublicKey, p.Endpoint)
		}
		peers = append(peers, status)
	}
	return peers, nil
}

// writeState writes what is known, with the number of the last word that was told.
func writeState(w io.Writer, peers []peerStatus, number int) error {
	return json.NewEncoder(w).Encode(word{Number: number, state: stateOf(peers)})
}

// readState reads what a predecessor wrote.
func readState(r io.Reader) (peers []peerStatus, number int, err error) {
	var w word
	b, err := io.ReadAll(r) // also whether it is whole
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err == nil {
		peers, err = w.peers()
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read the predecessor's state: %w", err)
	}
	return peers, w.Number, nil
}

// recent says whether the peer may have a session.
func (p *peerStatus) recent(now time.Time) bool {
	return p.endpoint.IsValid() && !p.handshake.IsZero() && now.Sub(p.handshake) < device.RejectAfterTime
}
