// SPDX-License-Identifier: Apache-2.0

// Dns is a DNS server on a well-known library. Over UDP each query stands for itself: from
// one packet to the next they go to the new process, with however many workers, and the old
// one answers what it has. The TCP listener goes along. Start it again, or send SIGHUP, for
// an upgrade.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"instar/dispatch"
	"instar/handover"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:5353", "`IP:port` to listen on")
	control := flag.String("control", "@instar-dns", "`path` of the control socket")
	root := flag.String("root", dispatch.DefaultRoot, "`folder` on a bpffs for the group's pins")
	workers := flag.Int("workers", 2, "UDP sockets")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, *addr, *control, *root, *workers)
	cancel()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, addr, control, root string, workers int) (err error) {
	h, err := succeed(ctx, handover.Options{Name: "dns", Socket: control, Probation: time.Second, Logger: slog.Default()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Abort(err)) }()
	tcp, err := h.Listen("dns", "tcp", addr)
	if err != nil {
		return err
	}
	group, err := dispatch.Open(dispatch.Options{
		Address: addr, Root: root, Service: "dns", Steering: dispatch.SteeringStateless,
		// A socket of the kernel's default size holds 256 small packets: with few workers a burst is too
		// much for it.
		ReceiveBuffer: 4 << 20,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, group.Close()) }()
	generation, err := group.Join(workers)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, generation.Close()) }()

	servers := []*dns.Server{{Listener: tcp, Handler: answer(generation.Number(), "tcp")}}
	for i, conn := range generation.Conns() {
		servers = append(servers, &dns.Server{PacketConn: conn, Handler: answer(generation.Number(), fmt.Sprint(i))})
	}
	failed := make(chan error, len(servers))
	for _, s := range servers {
		go func() {
			if err := s.ActivateAndServe(); err != nil && h.Err() == nil {
				failed <- err
			}
		}()
	}
	// One commit moves both: the listener accepts, and the kernel flips.
	h.OnActivate(func(context.Context) error { return generation.Activate() })
	if err := h.Ready(ctx); err != nil {
		return err
	}
	select {
	case err := <-failed:
		return err
	case <-h.Superseded():
	case <-ctx.Done():
	}
	// Nothing is remembered, so nothing has to be waited for: Drain returns when the
	// servers have read what the kernel had queued, Shutdown when they have answered.
	over := make(chan struct{})
	close(over)
	_, err = generation.Drain(context.Background(), dispatch.DrainOptions{Done: over, Final: ctx.Err() != nil})
	if errors.Is(err, dispatch.ErrReinstated) {
		err = nil // somebody rolled the group back by hand; this process leaves all the same
	}
	for _, s := range servers {
		err = errors.Join(err, s.Shutdown())
	}
	return err
}

// succeed waits while the predecessor is busy with another upgrade, or in its probation.
func succeed(ctx context.Context, o handover.Options) (*handover.Handover, error) {
	for {
		h, err := handover.NewContext(ctx, o)
		if !handover.Retryable(err) {
			return h, err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// answer answers every question with who does.
func answer(generation uint32, worker string) dns.Handler {
	return dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		reply := new(dns.Msg).SetReply(query)
		for _, q := range query.Question {
			reply.Answer = append(reply.Answer, &dns.TXT{
				Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 1},
				Txt: []string{fmt.Sprintf("%d %s %d", generation, worker, os.Getpid())},
			})
		}
		if err := w.WriteMsg(reply); err != nil {
			log.Print(err)
		}
	})
}
