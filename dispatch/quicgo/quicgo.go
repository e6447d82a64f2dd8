// SPDX-License-Identifier: Apache-2.0

package quicgo

import (
	"fmt"

	"github.com/quic-go/quic-go"

	"instar/dispatch"
	"instar/dispatch/connid"
)

// Labels of the secrets. A change of one is a change of what generations have
// in common.
const (
	labelReset  = "quic stateless reset"
	labelToken  = "quic token"
	labelTicket = "tls session ticket %d"
)

// Transport returns a transport on the socket of one worker, ready to listen.
// The caller closes it, before the generation.
func Transport(gen *dispatch.Generation, worker int) (*quic.Transport, error) {
	if worker < 0 || worker >= gen.Workers() {
		return nil, fmt.Errorf("make transport: worker %d of %d", worker, gen.Workers())
	}
	reset, err := gen.Group().Secret(labelReset, len(quic.StatelessResetKey{}))
	if err != nil {
		return nil, fmt.Errorf("make transport: %w", err)
	}
	token, err := gen.Group().Secret(labelToken, len(quic.TokenGeneratorKey{}))
	if err != nil {
		return nil, fmt.Errorf("make transport: %w", err)
	}
	ids := generator{gen.ConnectionIDs(), gen.Handle(worker), gen.Number()}
	return &quic.Transport{
		Conn:                  gen.Conns()[worker],
		ConnectionIDLength:    ids.ConnectionIDLen(),
		ConnectionIDGenerator: ids,
		StatelessResetKey:     (*quic.StatelessResetKey)(reset),
		TokenGeneratorKey:     (*quic.TokenGeneratorKey)(token),
	}, nil
}

// Transports returns one transport for each worker, in their order.
func Transports(gen *dispatch.Generation) ([]*quic.Transport, error) {
	all := make([]*quic.Transport, gen.Workers())
	for worker := range all {
		var err error
		if all[worker], err = Transport(gen, worker); err != nil {
			return nil, err // a transport that nobody used holds nothing
		}
	}
	return all, nil
}

// generator makes the connection IDs of one socket.
type generator struct {
	codec      *connid.Codec
	handle     connid.Handle
	generation uint32
}

func (g generator) ConnectionIDLen() int { return g.codec.Len() }

func (g generator) GenerateConnectionID() (quic.ConnectionID, error) {
	var buf [20]byte
	id, err := g.codec.Append(buf[:0], g.handle, g.generation)
	if err != nil {
		return quic.ConnectionID{}, fmt.Errorf("make connection ID: %w", err)
	}
	return quic.ConnectionIDFromBytes(id), nil
}

// ServerConfig returns a copy of base, which may be nil, with which only an
// active generation accepts early data. A client whose early data is rejected
// completes the handshake without it and sends its request again.
//
// Within one generation early data can be replayed, as anywhere; the handlers
// of requests that arrive in it have to be safe to repeat.
func ServerConfig(gen *dispatch.Generation, base *quic.Config) *quic.Config {
	return serverConfig(base, func() bool { return gen.State() == dispatch.StateActive })
}

func serverConfig(base *quic.Config, active func() bool) *quic.Config {
	if base == nil {
		base = &quic.Config{}
	}
	base = base.Clone()
	late := base.Clone() // for when it is not active
	late.Allow0RTT = false
	conf := base.Clone()
	conf.GetConfigForClient = func(info *quic.ClientInfo) (*quic.Config, error) {
		if base.GetConfigForClient != nil {
			chosen, err := base.GetConfigForClient(info)
			if err != nil {
				return nil, err
			}
			if chosen != nil && chosen.Allow0RTT && !active() {
				chosen = chosen.Clone()
				chosen.Allow0RTT = false
			}
			if chosen != nil {
				return chosen, nil
			}
		}
		if active() {
			return base, nil
		}
		return late, nil
	}
	return conf
}
