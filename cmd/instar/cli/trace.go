// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"instar/bpf"
	"instar/dispatch"
)

func (a *app) traceCommand() *cobra.Command {
	var verdict, peer string
	var count int
	cmd := &cobra.Command{
		Use:   "trace GROUP",
		Short: "Show each packet's way",
		Long: `Show what the data plane decides of each packet of a group, while it does so: the
verdict, who sent it, the generation and worker that got it, its size, and what it
names, such as a connection ID and whose that is. With TCP a line is a connection.

For that time the group has a program that tells, which takes up to a microsecond
for each packet; without a trace nothing of it is there. One trace runs
at a time: a new one ends the one before. If this command is killed (kill -9), run it
again, or "instar program upgrade GROUP", which takes the telling out.

It ends at an interrupt (Ctrl-C), or with --count. With --json each packet is a line
of its own. It needs what "instar program upgrade" needs.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error {
			fits, err := peerFilter(peer)
			if err != nil {
				return usagef("trace: --peer: %w", err)
			}
			if verdict != "" && !slices.Contains(bpf.VerdictNames[:], verdict) {
				return usagef("trace: --verdict: %q is none of %s", verdict, strings.Join(bpf.VerdictNames[:], ", "))
			}
			if count < 0 {
				return usagef("trace: --count: %d is negative", count)
			}
			return a.trace(args[0], count, func(e dispatch.Event) bool {
				return (verdict == "" || e.Verdict == verdict) && (peer == "" || fits(e.Peer))
			})
		},
	}
	cmd.Flags().StringVar(&verdict, "verdict", "", "only packets with this `verdict`, such as orphan")
	cmd.Flags().StringVar(&peer, "peer", "", "only packets from this `address`: IP, IP:port, or prefix such as 192.0.2.0/24")
	cmd.Flags().IntVar(&count, "count", 0, "end after `n` packets; 0: at an interrupt")
	a.jsonFlag(cmd)
	return cmd
}

// eventJSON is a packet for programs.
type eventJSON struct {
	Version    int        `json:"version"`
	Time       time.Time  `json:"time"`
	Verdict    string     `json:"verdict"`
	Peer       netip.Addr `json:"peer,omitzero"`
	Port       uint16     `json:"port,omitempty"`
	Generation uint32     `json:"generation"`
	Worker     int        `json:"worker"`
	Length     int        `json:"length"`
	Names      string     `json:"names,omitempty"`
	// Payload is the beginning of it in hex.
	Payload string `json:"payload,omitempty"`
}

func (a *app) trace(name string, count int, fits func(dispatch.Event) bool) (err error) {
	g, _, _, err := a.open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	ctx, end := context.WithCancel(ctx)
	defer end()
	encoder := json.NewEncoder(a.env.Stdout)
	shown := 0
	var broken error
	lost, err := g.Trace(ctx, func(e dispatch.Event) {
		if broken != nil || count > 0 && shown == count || !fits(e) {
			return
		}
		shown++
		if a.json {
			broken = encoder.Encode(eventJSON{jsonVersion, e.Time, e.Verdict, e.Peer.Addr(), e.Peer.Port(), e.Generation, e.Worker,
				e.Length, e.Name, hex.EncodeToString(e.Payload)})
		} else {
			_, broken = fmt.Fprintln(a.env.Stdout, eventLine(e))
		}
		if broken != nil || shown == count {
			end()
		}
	})
	if lost > 0 {
		fmt.Fprintf(a.env.Stderr, "note: %d more packets came faster than they could be shown\n", lost)
	}
	return errors.Join(err, broken)
}

// eventLine shows a packet.
func eventLine(e dispatch.Event) string {
	to := "nobody"
	if e.Worker >= 0 {
		to = fmt.Sprintf("generation %d, worker %d", e.Generation, e.Worker)
	}
	from := "a listener that closed"
	if e.Peer.IsValid() {
		from = e.Peer.String()
	}
	line := fmt.Sprintf("%s  %-8s  %s -> %s", e.Time.Format("15:04:05.000000"), e.Verdict, from, to)
	if e.Length > 0 {
		line += fmt.Sprintf("  %d octets", e.Length)
	}
	if e.Name != "" {
		line += "  " + e.Name
	}
	return line
}
