package Example::Counter;

use strict;
use warnings;

# Counts words (and what stands between them).
sub new {
    my ($class, %options) = @_;
    my $self = {
        words => {},
        least => $options{least} || 1,
    };
    return bless $self, $class;
}

sub add {
    my ($self, $text) = @_;
    foreach my $word (split /\s+/, $text) {
        next unless length $word;
        if ($word =~ /^\((.*)\)$/) {
            $word = $1;
        }
        elsif ($word eq ':)') {
            $self->{smiles}++;
            next;
        }
        $self->{words}{lc $word}++;
    }
    return $self;
}

sub top {
    my ($self, $count) = @_;
    my $words = $self->{words};
    my @sorted = sort { $words->{$b} <=> $words->{$a} || $a cmp $b }
        grep { $words->{$_} >= $self->{least} } keys %$words;
    return @sorted[0 .. ($count < @sorted ? $count : @sorted) - 1];
}

sub report {
    my ($self, $file) = @_;
    open(my $out, '>', $file) or die "cannot write $file: $!";
    print {$out} <<"END";
Words: ${\ scalar keys %{ $self->{words} }}
1) as they are
END
    close $out;
    my $result = eval {
        $self->top(3);
        1;
    };
    return $result ? 'done' : 'failed';
}

1;
