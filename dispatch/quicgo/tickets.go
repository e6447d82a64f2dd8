// SPDX-License-Identifier: Apache-2.0

package quicgo

import (
	"crypto/tls"
	"fmt"
	"sync"
	"time"

	"instar/dispatch"
)

// ticketEpoch is how long one key encrypts session tickets. A ticket is
// accepted until the end of the next epoch, so for 12 to 24 hours.
const ticketEpoch = 12 * time.Hour

// ServerTLS returns a copy of base for a server on gen. All generations of the
// group encrypt session tickets with the same keys, which change every 12 hours;
// tickets of the previous epoch are accepted, and those of the next one, from a
// machine whose clock is ahead.
//
// The configuration is resolved for each handshake: base.GetConfigForClient is
// called where it is set, and base.GetCertificate as ever, so a new certificate
// is served without a new generation. Ticket keys of base and of what
// GetConfigForClient returns are replaced; with SessionTicketsDisabled there
// are no tickets.
//
// It goes together with http3.ConfigureTLSConfig, around it or within it.
func ServerTLS(gen *dispatch.Generation, base *tls.Config) *tls.Config {
	return serverTLS(base, &ticketKeys{secret: gen.Group().Secret, now: time.Now})
}

func serverTLS(base *tls.Config, keys *ticketKeys) *tls.Config {
	base = base.Clone()
	conf := base.Clone()
	var (
		mu     sync.Mutex
		cached *tls.Config // base with the keys of the epoch
		epoch  int64
	)
	conf.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		now, list, err := keys.current()
		if err != nil {
			return nil, err
		}
		if base.GetConfigForClient != nil {
			chosen, err := base.GetConfigForClient(hello)
			if err != nil {
				return nil, err
			}
			if chosen != nil {
				return withTicketKeys(chosen, list), nil
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if cached == nil || epoch != now {
			cached, epoch = withTicketKeys(base, list), now
		}
		return cached, nil
	}
	return conf
}

// withTicketKeys returns a copy with explicit keys. crypto/tls takes the keys
// of a configuration that GetConfigForClient returns only when they are
// explicit, and those of the outer configuration otherwise.
func withTicketKeys(conf *tls.Config, keys [][32]byte) *tls.Config {
	conf = conf.Clone()
	conf.GetConfigForClient = nil
	conf.SetSessionTicketKeys(keys)
	return conf
}

// ticketKeys derives the keys of the current epoch.
type ticketKeys struct {
	secret func(label string, n int) ([]byte, error)
	now    func() time.Time

	mu    sync.Mutex
	epoch int64
	list  [][32]byte
}

// current returns the epoch and its keys, the one that encrypts first. When the
// next ones cannot be derived, it stays with those that it has.
func (k *ticketKeys) current() (int64, [][32]byte, error) {
	epoch := k.now().Unix() / int64(ticketEpoch/time.Second)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.list != nil && epoch == k.epoch {
		return k.epoch, k.list, nil
	}
	list := make([][32]byte, 0, 3)
	for _, e := range []int64{epoch, epoch - 1, epoch + 1} {
		key, err := k.secret(fmt.Sprintf(labelTicket, e), 32)
		if err != nil {
			if k.list != nil {
				return k.epoch, k.list, nil
			}
			return 0, nil, fmt.Errorf("derive session ticket keys: %w", err)
		}
		list = append(list, [32]byte(key))
	}
	k.epoch, k.list = epoch, list
	return epoch, list, nil
}
