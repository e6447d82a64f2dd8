// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"time"

	"golang.zx2c4.com/wireguard/device"
)

const (
	// introduceLimit is how long a peer is asked to come over. One that is there answers at
	// once, or to the device's own repetition (RekeyTimeout and its jitter).
	introduceLimit = 2*device.RekeyTimeout + time.Second
	// askAgain is how often a handshake is asked for that the device may have put off, since
	// it began one with the peer a moment before.
	askAgain = 250 * time.Millisecond
)

// introduction makes peers go to this process.
type introduction struct {
	began time.Time
	// done is closed when all of them have, or will not.
	done chan struct{}
	// all says, after joined is closed, that all of them have, and those of the
	// introductions before.
	all    bool
	joined chan struct{}
	peers  int
}

// introduce initiates handshakes with the peers. anew is for peers whose sessions with this
// process are of no use: the device would wait for RekeyTimeout after the last handshake.
func introduce(ctx context.Context, d *device.Device, peers []peerStatus, anew bool) *introduction {
	// wireguard-go takes down the time of a handshake by the wall clock; so does this.
	i := &introduction{began: time.Now().Round(0), done: make(chan struct{}), joined: make(chan struct{}), peers: len(peers)}
	waiting := map[device.NoisePublicKey]bool{}
	for _, p := range peers {
		waiting[p.key] = true
		if peer := d.LookupPeer(p.key); peer != nil && anew {
			peer.ExpireCurrentKeypairs()
		}
	}
	ask := func() {
		for key := range waiting {
			if p := d.LookupPeer(key); p != nil {
				_ = p.SendHandshakeInitiation(false) // the device repeats it
			} else {
				delete(waiting, key) // not in the configuration any more
			}
		}
	}
	ask()
	go func() {
		defer close(i.done)
		asked := time.Now()
		for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
			status, err := statusOf(d)
			if err != nil {
				return
			}
			for _, p := range status {
				if p.handshake.After(i.began) {
					delete(waiting, p.key)
				}
			}
			if len(waiting) == 0 {
				i.all = true
				return
			}
			if time.Since(i.began) > introduceLimit {
				return
			}
			if time.Since(asked) > askAgain {
				asked = time.Now()
				ask()
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	}()
	return i
}
